//! docs/frame.md, from the comments of the protocol.

const PROTO: &str = include_str!("../../../rpc/proto/forebay/v1/forebay.proto");

/// The messages that are told about with the first one that has them, and those that stand elsewhere in the protocol.
const FIRST: &str = "FrameReply";
const OTHERS: [&str; 3] = ["HealthCheck", "AlarmInfo", "CurvePoint"];

const HEAD: &str = "\
# The frame

A frame answers an operator's questions about a daemon at one moment: is anything wrong, is the cache worth it, why is
the hit rate not higher, which tier serves, who uses the cache, and what would help. `forebay top` shows the frame. The
daemon serves it as JSON at `http://127.0.0.1:9477/frame.json` (`http.address`), and `forebay top --json` prints the
same object.

- The daemon makes at most one frame a second, and none while nobody asks. All who ask within that second get the same
  frame; `at_ms` says when it was made.
- Counts begin at zero with each start of the daemon. Sizes are in bytes, times in seconds, ratios from 0 to 1. What is
  not known, or has no value, is `null`.
- \"now\" is the time since the frame before, at least a second. In a first frame it is the time since one of the last
  steps of the hour; `now_seconds` says how long it was.
- The history is made of parallel lists, the oldest step first. To get only steps that you do not have, ask for
  `/frame.json?boot=BOOT&hour_last=N&day_last=M`, with `boot`, `hour.last` and `day.last` of your last frame. If the
  daemon was started again meanwhile, you get all steps.
- Fields may be added; none changes its meaning.

This page is generated from the protocol. To regenerate it:
`FOREBAY_UPDATE_GOLDEN=1 cargo test -p forebay-daemon --test pages`.
";

pub fn page() -> String {
    let mut names = vec![FIRST.to_owned()];
    for line in PROTO.lines() {
        let name = line.strip_prefix("message ").and_then(|rest| rest.split(' ').next());
        let is_part = |name: &&str| name.starts_with("Frame") && ![FIRST, "FrameRequest"].contains(name);
        names.extend(name.filter(is_part).map(str::to_owned));
    }
    names.extend(OTHERS.map(str::to_owned));
    names.iter().fold(HEAD.to_owned(), |page, name| page + &section(name))
}

fn section(message: &str) -> String {
    let title = if message == FIRST { "the frame" } else { message };
    let mut text = format!("\n## {title}\n\n| field | type | meaning |\n|---|---|---|\n");
    let begin = PROTO.find(&format!("message {message} {{")).expect("the protocol has the message");
    let body = &PROTO[begin..];
    let fields = body[..body.find("\n}").expect("the message ends")].lines().skip(1);
    for line in fields.map(str::trim) {
        let (declared, meaning) = line.split_once("//").unwrap_or_else(|| panic!("no comment: {line}"));
        let words: Vec<&str> = declared.split_whitespace().take_while(|word| *word != "=").collect();
        let (name, kind) = words.split_last().expect("a field has a name");
        text += &format!("| `{name}` | {} | {} |\n", told(kind), meaning.trim());
    }
    text
}

/// A type as it is in JSON.
fn told(kind: &[&str]) -> String {
    let last = *kind.last().expect("a field has a type");
    let one = match last {
        "uint32" | "uint64" => "whole number".to_owned(),
        "double" | "float" => "number".to_owned(),
        "bool" => "true or false".to_owned(),
        "string" => "text".to_owned(),
        message => format!("[{message}](#{})", message.to_lowercase()),
    };
    match kind[0] {
        "repeated" if last == "float" => format!("list: {one} or null"),
        "repeated" => format!("list: {one}"),
        "optional" => format!("{one} or null"),
        _ => one,
    }
}
