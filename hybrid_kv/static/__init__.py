"""What kernels cost, known without a GPU: compiled, counted in the interpreter, beside those of other projects."""
