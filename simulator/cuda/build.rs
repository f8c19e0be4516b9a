//! Gives the library the driver's SONAME, and its own functions to itself: with
//! another library of the same symbols loaded before it, as a shim is, its calls
//! and `cuGetProcAddress` must not lead there. The real driver is linked so too.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}
