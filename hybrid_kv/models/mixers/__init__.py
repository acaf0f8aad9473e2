"""Layers that keep a window of convolution inputs and a recurrent state of earlier tokens, one file per recurrence."""
