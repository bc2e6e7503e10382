"""Cores are shared, and these networks are small."""

import torch

torch.set_num_threads(1)
