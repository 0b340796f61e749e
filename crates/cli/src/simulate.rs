//! `forebay simulate`: the simulator's table, or the same rows as JSON. Progress goes to standard error, if a person
//! reads it.

use std::io::{self, IsTerminal, Write};

use forebay_sim::Row;

use crate::arguments::Simulate;
use crate::bench::print_report;
use crate::failure::Failure;
use crate::output::print;

pub fn run(arguments: &Simulate) -> Result<(), Failure> {
    forebay_sim::check(&arguments.simulation).map_err(Failure::Usage)?;
    let mut progress: Box<dyn Write> = match io::stderr().is_terminal() {
        true => Box::new(io::stderr()),
        false => Box::new(io::sink()),
    };
    let rows = forebay_sim::simulate(&arguments.simulation, &mut progress)?;
    if arguments.json {
        print_report("simulate", &rows.iter().map(Row::to_json).collect::<Vec<_>>());
    } else {
        print(&forebay_sim::table::table(&rows));
    }
    Ok(())
}
