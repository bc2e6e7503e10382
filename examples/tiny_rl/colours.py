"""Okabe and Ito's colours, which colour-blind readers can tell apart."""

ORANGE = "#D55E00"
BLUE = "#0072B2"
SKY = "#9FD3F0"
GREY = "#555555"
