"""Measuring, keeping and drawing: accuracy, times, predictions, studies, rows, the report."""
