"""What only an NVIDIA GPU needs: libraries, kernels, recorded steps."""
