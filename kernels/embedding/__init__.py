"""Trainable embeddings: initialize rows, sum gradients by row, and update the rows of a minibatch.

All kernels run on the CPU, on rows in host memory. They write in place, and their results do not
depend on the number of threads.

Notation: N rows in the table, D columns, B gathered rows, U different rows among them.
"""
