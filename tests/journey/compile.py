"""How a model is compiled, and what is done with what comes out."""
