//! Gives the library the driver's SONAME and binds its own symbols to itself, as the real driver does. If another library with
//! the same symbols, such as a shim, is loaded before it, its calls must not lead to that one.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // It stays loaded, so that a process maps the page once, even if it loads the library several times.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
