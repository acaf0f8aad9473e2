"""Layers that keep a window of convolution inputs and a recurrent state; a file per recurrence."""
