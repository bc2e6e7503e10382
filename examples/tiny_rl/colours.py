"""Okabe and Ito's colours, which colour-blind readers can tell apart."""

ORANGE, BLUE, SKY, GREY = "#D55E00", "#0072B2", "#9FD3F0", "#555555"
