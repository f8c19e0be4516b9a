//! The exported functions, a file for each family. Names, signatures and error codes are those of cuda.h and of driver
//! 535, where each function is documented. No file here uses another one.

mod absent;
mod array;
mod callback;
mod capture;
mod context;
mod copy;
mod device;
mod dma_buf;
mod driver;
mod error;
mod event;
mod fill;
mod function;
mod graph;
mod graph_pool;
mod host_memory;
mod launch;
mod library;
mod managed;
mod memory;
mod module;
mod multicast;
mod occupancy;
mod pointer;
mod pool;
mod primary;
mod procaddress;
mod stream;
mod vmm;
