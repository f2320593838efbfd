"""Small real models of `transformers`, made where they are needed."""
