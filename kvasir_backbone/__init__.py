"""The model without its experts: routing, dispatch, audit, sampling and the public API.

The only package that decides which experts run. Imports the three packages before it.
"""
