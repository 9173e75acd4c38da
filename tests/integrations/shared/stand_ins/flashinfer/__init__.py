"""Stands in for FlashInfer: the part of ``flashinfer.comm`` that engines sum and norm by, over torch.distributed."""
