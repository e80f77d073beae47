"""Wallets, windows, plans, scarcity, claims, receipts and the credit ledger.

Knows nothing of sockets' details or tensors. Imports `relay` only.
"""
