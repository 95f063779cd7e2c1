"""Optimizers of trainable embeddings, which update the rows of a minibatch in host memory."""
