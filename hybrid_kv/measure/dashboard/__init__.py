"""`hybrid-kv report`: one page, one pull-request comment and the README's tables, all from the rows in `results/`."""
