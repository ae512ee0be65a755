"""The environments that come with async_rl: small files, meant to be read and copied."""
