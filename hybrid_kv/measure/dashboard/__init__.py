"""`hybrid-kv report`: the page, a pull-request comment and the README's tables, from rows."""
