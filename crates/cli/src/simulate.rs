//! `forebay simulate`: the simulator's table, or the same rows as JSON. Progress goes to standard error.

use crate::arguments::Simulate;
use crate::bench::print_report;
use crate::failure::Failure;
use crate::output::print;

pub fn run(arguments: &Simulate) -> Result<(), Failure> {
    let rows = forebay_sim::simulate(&arguments.simulation, &mut std::io::stderr())?;
    if arguments.json {
        print_report("simulate", &rows);
    } else {
        print(&forebay_sim::table::table(&rows));
    }
    Ok(())
}
