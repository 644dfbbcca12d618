"""Several conversions of one model side by side: size against error, KL divergence and speed."""
