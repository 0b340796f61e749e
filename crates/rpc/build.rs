//! Compiles the .proto with protox, so that no protoc is needed.

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
    build.compile_fds(files)?;
    Ok(())
}
