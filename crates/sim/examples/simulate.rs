//! Runs a simulation: `cargo run --release -p forebay-sim --example simulate -- TRACE.. [--json]`.

use clap::Parser;

#[derive(Parser)]
struct Example {
    #[command(flatten)]
    arguments: forebay_sim::Arguments,
    /// One JSON object a row instead of the table
    #[arg(long)]
    json: bool,
}

fn main() -> std::process::ExitCode {
    let Example { arguments, json } = Example::parse();
    match forebay_sim::simulate(&arguments, &mut std::io::stderr()) {
        Ok(rows) if json => {
            rows.iter().for_each(|row| println!("{}", serde_json::to_string(row).expect("rows are plain")))
        }
        Ok(rows) => print!("{}", forebay_sim::table::table(&rows)),
        Err(error) => {
            eprintln!("error: {error}");
            error.hint_text().inspect(|hint| eprintln!("hint: {hint}"));
            return std::process::ExitCode::FAILURE;
        }
    }
    std::process::ExitCode::SUCCESS
}
