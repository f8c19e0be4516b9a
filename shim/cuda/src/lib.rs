//! libcuda.so.1 as a capped container sees it.
