//! Gives the library the driver's SONAME, and its own functions to itself: with
//! another library of the same symbols loaded before it, as a shim is, its calls
//! must not lead there. The real driver is linked so too.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // It maps the machine once for each process, however often it is loaded.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
