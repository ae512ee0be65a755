"""How bytes travel: process groups, HTTP, shared memory, CUDA IPC."""
