//! Gives the library the driver's SONAME and binds its own symbols to itself. Where another library with the same symbols
//! is loaded before it, as a shim is, its calls and `cuGetProcAddress` must not lead to that one. The real driver is linked in this way.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}
