//! The history of the hit rate as a picture.

use forebay_rpc::proto::FrameHistory;

use super::text::{Line, Style};

/// What is drawn, the first on top of the others.
const MARKS: [(char, Style); 3] = [('*', Style::Good), ('-', Style::Title), ('=', Style::Plain)];
const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Hit rate, optimum and ceiling of so many steps each; the newest last.
struct Column([Option<f32>; 3]);

/// `height` lines of at most `width`: a row of words, the picture, and its axis.
pub fn chart(hour: &FrameHistory, width: usize, height: usize) -> Vec<Line> {
    const LEFT: usize = 7;
    let (columns, steps) = columns(hour, width.saturating_sub(LEFT + 1));
    let rows = height.saturating_sub(2).max(1);
    let values = columns.iter().flat_map(|Column(values)| values.iter().flatten());
    let most = values.fold(0.0_f32, |most, value| most.max(*value));
    // A fifth is the least that is told apart from nothing.
    let top = ((most * 5.0).ceil() / 5.0).clamp(0.2, 1.0);
    let minutes = steps as f64 * hour.step_seconds / 60.0;
    let column = if minutes == 1.0 { "a minute".to_owned() } else { format!("{:.0} s", 60.0 * minutes) };
    let mut lines = vec![Line::styled(
        Style::Title,
        format!("HISTORY  a column is {column}   * hit rate   - optimum   = without limit"),
    )];
    for row in 0..rows {
        let upper = top * (rows - row) as f32 / rows as f32;
        let mut line = Line::plain(format!("{:>5.0} |", 100.0 * upper));
        for Column(values) in &columns {
            // The lowest row has what is 0 too.
            let is_here = |value: &f32| {
                let at = ((value / top) * rows as f32).round().max(1.0) as usize;
                at == rows - row
            };
            let mark = values.iter().zip(MARKS).find(|(value, _)| value.as_ref().is_some_and(is_here));
            line = match mark {
                Some((_, (mark, style))) => line.and(style, mark),
                None => line.and(Style::Plain, ' '),
            };
        }
        lines.push(line);
    }
    let ago = columns.len() as f64 * minutes;
    let axis = format!("  % 0 +-{:.0} min ago", ago);
    let dashes = (LEFT + columns.len()).saturating_sub(axis.chars().count() + 3);
    lines.push(Line::plain(format!("{axis}{}now", "-".repeat(dashes))));
    lines
}

/// The hit rate alone, in one row.
pub fn spark(hour: &FrameHistory, width: usize) -> Line {
    let (columns, _) = columns(hour, width.saturating_sub(10).min(60));
    let block = |Column(values): &Column| match values[0] {
        Some(ratio) => BLOCKS[((ratio * 8.0) as usize).min(7)],
        None => ' ',
    };
    Line::styled(Style::Title, "LAST HOUR ").and(Style::Good, columns.iter().map(block).collect::<String>())
}

/// At most so many, of so many steps each.
fn columns(hour: &FrameHistory, most: usize) -> (Vec<Column>, usize) {
    let steps = [12, 6, 3, 2, 1].into_iter().rev().find(|steps| 720 / steps <= most.max(60)).unwrap_or(12);
    let count = (720 / steps).min(most);
    let end = hour.end_ms.len();
    let column = |back: usize| {
        let to = end.saturating_sub(back * steps);
        let from = to.saturating_sub(steps);
        let (mut keys, mut hits) = (0.0, 0.0);
        for at in from..to {
            let (asked, ratio) = (hour.keys_per_second[at], hour.hit_ratio[at]);
            if ratio.is_finite() {
                keys += asked;
                hits += asked * ratio;
            }
        }
        let last = |list: &[f32]| list[from..to].iter().rev().copied().find(|value| value.is_finite());
        Column([(keys > 0.0).then(|| hits / keys), last(&hour.optimum_ratio), last(&hour.ceiling_ratio)])
    };
    ((0..count).rev().map(column).collect(), steps)
}
