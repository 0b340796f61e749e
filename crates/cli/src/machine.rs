//! What this program is and what it runs on, as bench reports and `doctor` state it.

use std::fs;
use std::sync::LazyLock;

use serde::Serialize;
use serde_json::{Value, json};

/// The commit that this program was built from; empty if it was not built from a checkout.
pub const REVISION: &str = env!("BUILD_REVISION");

/// Version, protocol and, if it was built from a checkout, the revision.
pub fn version() -> &'static str {
    static VERSION: LazyLock<String> = LazyLock::new(|| {
        let revision = match REVISION {
            "" => String::new(),
            revision => format!(", revision {revision}"),
        };
        format!("{} (protocol {}{revision})", env!("CARGO_PKG_VERSION"), forebay_rpc::PROTOCOL_VERSION)
    });
    &VERSION
}

/// What `forebay version` prints.
pub fn about() -> String {
    let features = if FEATURES.is_empty() { "none".to_owned() } else { FEATURES.join(", ") };
    format!(
        "forebay {}\nformats: pool {}, disk {}, store {} and {}\nengines here: copies {}, disks {}\n\
         optional features: {features}\n",
        version(),
        forebay_io::pool::FORMAT_VERSION,
        forebay_io::ssd::FORMAT_VERSION,
        forebay_io::header::VERSION,
        forebay_io::header::VERSION_WITH_MAC,
        copy_engine(),
        disk_engine(),
    )
}

/// The same facts for programs.
pub fn about_json() -> Value {
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "protocol": forebay_rpc::PROTOCOL_VERSION,
        "revision": (!REVISION.is_empty()).then_some(REVISION),
        "formats": {
            "pool": forebay_io::pool::FORMAT_VERSION,
            "disk": forebay_io::ssd::FORMAT_VERSION,
            "store": [forebay_io::header::VERSION, forebay_io::header::VERSION_WITH_MAC],
        },
        "engines": {"copies": copy_engine(), "disks": disk_engine()},
        "optional_features": FEATURES,
    })
}

/// The optional features that this program was built with.
const FEATURES: &[&str] = if cfg!(feature = "object") { &["object"] } else { &[] };

/// On this machine.
fn copy_engine() -> String {
    forebay_device::Level::available().first().map_or_else(String::new, ToString::to_string)
}

/// On this machine.
fn disk_engine() -> &'static str {
    if io_uring::IoUring::new(2).is_ok() { "io_uring" } else { "threads" }
}

/// The `machine` of a bench report.
#[derive(Debug, Serialize)]
pub struct Machine {
    pub cpu: String,
    pub cpus: usize,
    pub memory_bytes: u64,
    pub kernel: String,
}

impl Machine {
    pub fn here() -> Machine {
        Machine {
            cpu: field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| std::env::consts::ARCH.to_string()),
            cpus: std::thread::available_parallelism().map_or(1, |cpus| cpus.get()),
            memory_bytes: kib(&read("/proc/meminfo"), "MemTotal").unwrap_or(0),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        }
    }
}

/// Empty if there is no such file, as on other kernels.
pub fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The value after `name:` in a file of such lines.
pub fn field(text: &str, name: &str) -> Option<String> {
    let value = |line: &str| Some(line.strip_prefix(name)?.trim_start().strip_prefix(':')?.trim().to_string());
    text.lines().find_map(value)
}

/// A field of /proc/meminfo, in bytes.
pub fn kib(text: &str, name: &str) -> Option<u64> {
    field(text, name)?.strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "MemTotalish:  1 kB\nMemTotal:       24617016 kB\nHugePages_Free:   12\nmodel name\t: Fast CPU\n";
        assert_eq!(kib(text, "MemTotal"), Some(24_617_016 << 10));
        assert_eq!(kib(text, "HugePages_Free"), None, "not in kB");
        assert_eq!(field(text, "HugePages_Free"), Some("12".to_string()));
        assert_eq!(field(text, "model name"), Some("Fast CPU".to_string()));
    }
}
