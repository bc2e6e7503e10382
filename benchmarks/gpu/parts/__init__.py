"""What is measured: each part fills one table, row by row, so that what it has survives its failure."""
