//! What an admin's policies amount to for one GPU.
