"""Mathematics without clients, a file for each problem: quadratic programmes, linear systems, Gaussian processes."""
