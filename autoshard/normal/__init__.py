"""The normal form of torch's operators: what both the analyzer and the eager runtime reduce to.

``rewrites`` and ``rewrites_nn`` turn a call as torch issues it into calls of the normal form (one
result each, products without a bias, views without sizes); ``ir`` holds the values while that is
done; ``operators`` says what every operator of the normal form computes.
"""
