//! Gives the library the driver's SONAME and binds its own symbols to itself. Where another library with the same symbols
//! is loaded before it, as a shim is, its calls must not lead to that one. The real driver is linked in this way.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // It stays loaded, so that a process maps the page once, however often it loads the library.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
