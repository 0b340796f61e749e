//! Compiles the .proto with protox, so that no protoc is needed. Also writes down, from the same descriptors, which
//! lists each request has.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use protox::prost_reflect::{DescriptorPool, FieldDescriptor, Kind, MessageDescriptor};

/// The messages that a frame is made of.
const FRAME: [&str; 17] = [
    "FrameReply",
    "FramePool",
    "FrameLookups",
    "FrameWindow",
    "FrameEstimates",
    "FrameMiss",
    "FrameTier",
    "FrameEngine",
    "FrameNamespace",
    "FrameTenant",
    "FrameSaved",
    "FrameHistory",
    "FrameSeries",
    "FrameTierSeries",
    "HealthCheck",
    "AlarmInfo",
    "CurvePoint",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile(["forebay/v1/forebay.proto"], ["proto"])?;
    let mut build = tonic_prost_build::configure();
    // The daemon serves the frame also as JSON: with these names, and numbers that are not known as null.
    for message in FRAME {
        build = build.type_attribute(format!(".forebay.v1.{message}"), "#[derive(serde::Serialize)]");
    }
    let lists = lists_of_requests(&DescriptorPool::from_file_descriptor_set(files.clone())?);
    std::fs::write(Path::new(&std::env::var("OUT_DIR")?).join("lists.rs"), lists)?;
    build.compile_fds(files)?;
    Ok(())
}

/// The source of `lists::of`: see `src/lists.rs`.
fn lists_of_requests(pool: &DescriptorPool) -> String {
    let (mut arms, mut statics, mut seen) = (String::new(), String::new(), BTreeSet::new());
    for service in pool.services() {
        for method in service.methods() {
            let path = format!("/{}/{}", service.full_name(), method.name());
            writeln!(arms, "    \"{path}\" => &{},", name(&method.input())).expect("a string takes all");
            describe(&method.input(), &mut statics, &mut seen);
        }
    }
    format!(
        "{statics}\n/// The lists of the request of the method at `path`, none if there is no such method.\n\
         pub fn of(path: &str) -> &'static Lists {{\n    match path {{\n{arms}    _ => &NONE,\n    }}\n}}\n"
    )
}

fn describe(message: &MessageDescriptor, statics: &mut String, seen: &mut BTreeSet<String>) {
    if !seen.insert(name(message)) {
        return;
    }
    let mut lists = String::new();
    for field in message.fields() {
        if let Kind::Message(entry) = field.kind()
            && !field.is_map()
        {
            describe(&entry, statics, seen);
        }
        if let Some(entries) = entries(&field) {
            write!(lists, "({}, {entries}), ", field.number()).expect("a string takes all");
        }
    }
    writeln!(statics, "static {}: Lists = Lists(&[{lists}]);", name(message)).expect("a string takes all");
}

/// What a field's occurrences add to memory, if they add up.
fn entries(field: &FieldDescriptor) -> Option<String> {
    let text = "size_of::<String>()";
    match field.kind() {
        _ if field.is_map() => Some(format!("Entries::Lengths {{ bytes: 3 * {text}, of: &NONE }}")),
        Kind::Message(of) => {
            let bytes = if field.is_list() { format!("size_of::<proto::{}>()", of.name()) } else { "0".to_owned() };
            Some(format!("Entries::Lengths {{ bytes: {bytes}, of: &{} }}", name(&of)))
        }
        _ if !field.is_list() => None,
        Kind::String | Kind::Bytes => Some(format!("Entries::Lengths {{ bytes: {text}, of: &NONE }}")),
        // These are as long on the wire.
        Kind::Fixed32 | Kind::Fixed64 | Kind::Sfixed32 | Kind::Sfixed64 | Kind::Float | Kind::Double => None,
        _ => Some("Entries::Numbers".to_owned()),
    }
}

fn name(message: &MessageDescriptor) -> String {
    message.full_name().replace('.', "_").to_uppercase()
}
