//! A simulated libcuda.so.1.
