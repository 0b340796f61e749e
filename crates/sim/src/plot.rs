//! Hit rate by bytes against the pool's capacity as an SVG picture. There is a panel for each trace, and a line for
//! each policy and SSD. Where there is an SSD a thin line shows what the pool alone served.

use std::fmt::Write;

use crate::simulate::Row;

const PANEL: (f64, f64) = (340.0, 260.0);
const MARGIN: (f64, f64, f64, f64) = (46.0, 34.0, 16.0, 66.0); // left, top, right, bottom
/// Distinguishable with colour blindness (Okabe and Ito); dashes repeat the information.
const COLOURS: [&str; 6] = ["#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const BOUND: &str = "#444444";

/// Rows of one or several traces.
pub fn svg(rows: &[Row]) -> String {
    let mut traces: Vec<&str> = Vec::new();
    rows.iter().for_each(|row| {
        if !traces.contains(&row.trace.as_str()) {
            traces.push(&row.trace)
        }
    });
    let width = traces.len() as f64 * (PANEL.0 + MARGIN.0 + MARGIN.2);
    let height = PANEL.1 + MARGIN.1 + MARGIN.3;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (at, trace) in traces.iter().enumerate() {
        let rows: Vec<&Row> = rows.iter().filter(|row| row.trace == *trace).collect();
        let left = at as f64 * (PANEL.0 + MARGIN.0 + MARGIN.2) + MARGIN.0;
        Panel::new(left, &rows).draw(trace, &rows, &mut text);
    }
    text + "</svg>\n"
}

struct Panel {
    left: f64,
    /// Logarithms of the smallest and the largest share.
    shares: (f64, f64),
    highest: f64,
}

impl Panel {
    fn new(left: f64, rows: &[&Row]) -> Panel {
        let logs = rows.iter().map(|row| row.capacity_share.max(1e-9).ln());
        let (low, high) = logs.fold((f64::MAX, f64::MIN), |(low, high), log| (low.min(log), high.max(log)));
        let ceiling = rows.iter().map(|row| ceiling(row)).fold(0.0, f64::max);
        let shares = if high > low { (low, high) } else { (low - 1.0, high + 1.0) };
        Panel { left, shares, highest: (ceiling * 1.08).clamp(0.05, 1.0) }
    }

    fn x(&self, share: f64) -> f64 {
        self.left + (share.ln() - self.shares.0) / (self.shares.1 - self.shares.0) * PANEL.0
    }

    fn y(&self, ratio: f64) -> f64 {
        MARGIN.1 + PANEL.1 * (1.0 - ratio / self.highest)
    }

    fn draw(&self, trace: &str, rows: &[&Row], text: &mut String) {
        self.axes(trace, rows, text);
        let ceiling = ceiling(rows[0]);
        let ends = [(self.shares.0.exp(), ceiling), (self.shares.1.exp(), ceiling)];
        self.line(&ends, BOUND, ("2 3", 1.8), text);
        let mut legend = vec![("ceiling", BOUND, "2 3")];
        let mut lines: Vec<(String, Vec<&Row>)> = Vec::new();
        for row in rows {
            match lines.iter_mut().find(|(label, _)| *label == self::label(row)) {
                Some((_, own)) => own.push(row),
                None => lines.push((self::label(row), vec![row])),
            }
        }
        let is_new = |row: &&Row| row.policy == rows[0].policy;
        for own in lines.iter().map(|(_, own)| own).filter(|own| is_new(&own[0])) {
            let opt = |row: &&Row| Some((row.capacity_share, row.opt_hit_bytes? as f64 / row.bytes as f64));
            let opt: Vec<_> = own.iter().filter_map(opt).collect();
            if !opt.is_empty() {
                self.line(&opt, BOUND, ("7 3", 1.8), text);
            }
        }
        if rows[0].opt_hit_bytes.is_some() {
            legend.push(("optimum", BOUND, "7 3"));
        }
        for (at, (label, own)) in lines.iter().enumerate() {
            let colour = COLOURS[at % COLOURS.len()];
            let dash = if at == 0 { "" } else { ["", "6 2", "1 2", "8 2 2 2", "4 4", "3 1"][at % 6] };
            let points: Vec<_> = own.iter().map(|row| (row.capacity_share, row.hit_bytes_ratio())).collect();
            self.line(&points, colour, (dash, 1.8), text);
            if own[0].ssd_capacity_bytes > 0 {
                let pool = |row: &&Row| (row.capacity_share, row.pool_hits as f64 / row.blocks as f64);
                self.line(&own.iter().map(pool).collect::<Vec<_>>(), colour, ("", 0.7), text);
            }
            legend.push((label, colour, dash));
        }
        self.legend(&legend, text);
    }

    fn axes(&self, trace: &str, rows: &[&Row], text: &mut String) {
        let (right, bottom) = (self.left + PANEL.0, MARGIN.1 + PANEL.1);
        let _ = writeln!(
            text,
            "<text x=\"{}\" y=\"20\" font-size=\"13\" font-weight=\"bold\">{}</text>",
            self.left,
            escape(trace)
        );
        let step = [0.01, 0.02, 0.05, 0.1, 0.2].into_iter().find(|step| self.highest / step <= 6.0).unwrap_or(0.2);
        for n in 0..=(self.highest / step) as usize {
            let (ratio, y) = (n as f64 * step, self.y(n as f64 * step));
            let _ = writeln!(text, "<path d=\"M{:.1} {y:.1}H{right:.1}\" stroke=\"#e0e0e0\"/>", self.left);
            let _ = writeln!(
                text,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{:.0}%</text>",
                self.left - 6.0,
                y + 4.0,
                ratio * 100.0
            );
        }
        let mut shares: Vec<f64> = rows.iter().map(|row| row.capacity_share).collect();
        shares.sort_by(f64::total_cmp);
        // Capacities are whole blocks, so shares meant to be equal differ slightly.
        shares.dedup_by(|a, b| (*a / *b - 1.0).abs() < 0.02);
        for share in shares {
            let label = (share * 1e4).round() / 1e2;
            let _ = writeln!(
                text,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}%</text>",
                self.x(share),
                bottom + 15.0
            );
        }
        let _ = writeln!(
            text,
            "<path d=\"M{:.1} {:.1}V{bottom:.1}H{right:.1}\" fill=\"none\" stroke=\"#888888\"/>",
            self.left, MARGIN.1
        );
        let middle = self.left + PANEL.0 / 2.0;
        let _ = writeln!(
            text,
            "<text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">pool, share of different blocks</text>",
            bottom + 30.0
        );
    }

    /// `stroke` gives its dashes and its width.
    fn line(&self, points: &[(f64, f64)], colour: &str, stroke: (&str, f64), text: &mut String) {
        let (dash, width) = stroke;
        let place = |(share, ratio): &(f64, f64)| format!("{:.1},{:.1}", self.x(*share), self.y(*ratio));
        let places: Vec<String> = points.iter().map(place).collect();
        let _ = writeln!(
            text,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\" stroke-dasharray=\"{dash}\"/>",
            places.join(" ")
        );
    }

    fn legend(&self, entries: &[(&str, &str, &str)], text: &mut String) {
        const COLUMNS: usize = 4;
        for (at, (name, colour, dash)) in entries.iter().enumerate() {
            let x = self.left + (at % COLUMNS) as f64 * PANEL.0 / COLUMNS as f64;
            let y = MARGIN.1 + PANEL.1 + 44.0 + (at / COLUMNS) as f64 * 14.0;
            let _ = writeln!(
                text,
                "<path d=\"M{x:.1} {y:.1}h22\" stroke=\"{colour}\" stroke-width=\"1.8\" stroke-dasharray=\"{dash}\"/>"
            );
            let _ = writeln!(text, "<text x=\"{:.1}\" y=\"{:.1}\">{}</text>", x + 27.0, y + 4.0, escape(name));
        }
    }
}

fn ceiling(row: &Row) -> f64 {
    row.infinite_hit_bytes as f64 / row.bytes as f64
}

fn label(row: &Row) -> String {
    match row.ssd_capacity_bytes {
        0 => row.policy.clone(),
        _ => format!("{} + {}%", row.policy, (row.ssd_capacity_share * 1e4).round() / 1e2),
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
