"""Identities, certificates, frames, Noise sessions, flow control, circuits and metering.

Knows nothing of windows, claims, credit or models. Imports no other Kvasir package.
"""
