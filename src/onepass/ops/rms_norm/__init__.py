"""RMSNorm and LayerNorm, plain, gated, biased and quantized."""
