//! Names the library as NVIDIA names its own: once a test has loaded it by its path, who asks for `libcuda.so.1` gets
//! it.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
}
