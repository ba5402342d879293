"""What a model and its tokenizer are, as far as a cache must know."""
