"""One study of rankings of KV heads: conditions, each measured once, and analyses that report on them."""
