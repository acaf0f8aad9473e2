"""What measures, keeps and draws: accuracy, times, predictions, studies, rows and the report."""
