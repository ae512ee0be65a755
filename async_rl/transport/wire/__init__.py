"""Transports for parcels: process groups, HTTP, shared memory, CUDA IPC."""
