//! What of a frame is looked at, and how keys change that.

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum View {
    #[default]
    Answer,
    Misses,
    Curves,
    Engines,
    Tiers,
    Help,
}

/// Whose table stands below the tiers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Who {
    #[default]
    Engines,
    Tenants,
    Namespaces,
}

/// Of engines.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Sort {
    #[default]
    Keys,
    HitRate,
    Leased,
    Name,
}

#[derive(Clone, Default, Debug)]
pub struct Look {
    pub view: View,
    pub who: Who,
    pub sort: Sort,
    /// Only names that have it are shown.
    pub filter: String,
    pub is_typing: bool,
    pub is_paused: bool,
    /// Why the frame is an old one.
    pub gone: Option<String>,
    /// Stands in place of the keys until the next one.
    pub said: Option<String>,
}

/// What a key asks of others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wish {
    Nothing,
    Quit,
    Write,
}

/// Longer than any name that is shown.
const LONGEST_FILTER: usize = 64;

impl Sort {
    pub fn name(self) -> &'static str {
        match self {
            Sort::Keys => "keys a second",
            Sort::HitRate => "hit rate",
            Sort::Leased => "leased blocks",
            Sort::Name => "name",
        }
    }
}

impl Look {
    /// Whether a row with these names is shown.
    pub fn shows(&self, names: &[&str]) -> bool {
        let wanted = self.filter.to_lowercase();
        names.iter().any(|name| name.to_lowercase().contains(&wanted))
    }

    pub fn press(&mut self, key: Key) -> Wish {
        self.said = None;
        if key == Key::Interrupt {
            return Wish::Quit;
        }
        if self.is_typing {
            self.type_in(key);
            return Wish::Nothing;
        }
        match key {
            Key::Char('q') => return Wish::Quit,
            Key::Char('w') => return Wish::Write,
            Key::Char('p') => self.is_paused = !self.is_paused,
            Key::Char('m') => self.view = View::Misses,
            Key::Char('c') => self.view = View::Curves,
            Key::Char('e') => self.view = View::Engines,
            Key::Char('t') => self.view = View::Tiers,
            Key::Char('?' | 'h') => self.view = View::Help,
            Key::Char('1') => self.view = View::Answer,
            Key::Escape if self.view != View::Answer => self.view = View::Answer,
            Key::Escape => self.filter.clear(),
            Key::Char('/') => self.is_typing = true,
            Key::Char('s') => {
                self.sort = match self.sort {
                    Sort::Keys => Sort::HitRate,
                    Sort::HitRate => Sort::Leased,
                    Sort::Leased => Sort::Name,
                    Sort::Name => Sort::Keys,
                };
                self.said = Some(format!("engines are sorted by {}", self.sort.name()));
            }
            Key::Tab => {
                self.who = match self.who {
                    Who::Engines => Who::Tenants,
                    Who::Tenants => Who::Namespaces,
                    Who::Namespaces => Who::Engines,
                };
            }
            _ => {}
        }
        Wish::Nothing
    }

    fn type_in(&mut self, key: Key) {
        match key {
            Key::Enter => self.is_typing = false,
            Key::Escape => {
                self.filter.clear();
                self.is_typing = false;
            }
            Key::Backspace => {
                self.filter.pop();
            }
            Key::Char(letter) if self.filter.chars().count() < LONGEST_FILTER => self.filter.push(letter),
            _ => {}
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Key {
    Char(char),
    Tab,
    Enter,
    Escape,
    Backspace,
    Interrupt,
}

impl Key {
    /// The keys of what a terminal has sent at once. Keys that are sent as an escape and more, such as arrows, have no
    /// meaning here.
    pub fn all(sent: &[u8]) -> Vec<Key> {
        let text = String::from_utf8_lossy(sent);
        let (mut keys, mut letters) = (Vec::new(), text.chars().peekable());
        while let Some(letter) = letters.next() {
            keys.extend(match letter {
                '\t' => Some(Key::Tab),
                '\r' | '\n' => Some(Key::Enter),
                '\x03' => Some(Key::Interrupt),
                '\x7f' | '\x08' => Some(Key::Backspace),
                '\x1b' if letters.next_if(|next| matches!(next, '[' | 'O')).is_some() => {
                    let _ = letters.find(|letter| letter.is_ascii_alphabetic() || *letter == '~');
                    None
                }
                '\x1b' => Some(Key::Escape),
                letter if !letter.is_control() => Some(Key::Char(letter)),
                _ => None,
            });
        }
        keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(sent: &str) -> Look {
        let mut look = Look::default();
        let wishes: Vec<Wish> = Key::all(sent.as_bytes()).into_iter().map(|key| look.press(key)).collect();
        assert!(wishes.iter().all(|wish| *wish == Wish::Nothing), "{wishes:?}");
        look
    }

    #[test]
    fn each_view_has_a_key_and_escape_goes_back() {
        for (key, view) in [("m", View::Misses), ("c", View::Curves), ("e", View::Engines), ("t", View::Tiers)] {
            let mut look = after(key);
            assert_eq!(look.view, view);
            look.press(Key::Escape);
            assert_eq!(look.view, View::Answer);
        }
        assert_eq!((after("?").view, after("?1").view), (View::Help, View::Answer));
        assert_eq!(
            (after("\t").who, after("\t\t").who, after("\t\t\t").who),
            (Who::Tenants, Who::Namespaces, Who::Engines)
        );
        assert_eq!((after("s").sort, after("ssss").sort), (Sort::HitRate, Sort::Keys));
        assert!(after("p").is_paused && !after("pp").is_paused);
    }

    #[test]
    fn letters_of_a_filter_are_no_commands() {
        let look = after("/qwp\x7fe\r");
        assert_eq!((look.filter.as_str(), look.is_typing, look.view), ("qwe", false, View::Answer));
        assert!(look.shows(&["aQWEb"]) && !look.shows(&["qw", "e"]) && Look::default().shows(&[""]));
        let mut look = after("/abc");
        look.press(Key::Escape);
        assert_eq!((look.filter.as_str(), look.is_typing), ("", false));
    }

    #[test]
    fn q_and_interrupt_quit_w_writes_and_arrows_do_nothing() {
        let mut look = Look::default();
        assert_eq!(look.press(Key::Char('q')), Wish::Quit);
        assert_eq!(look.press(Key::Char('w')), Wish::Write);
        look.is_typing = true;
        assert_eq!(look.press(Key::Interrupt), Wish::Quit);
        assert_eq!(Key::all(b"\x1b[A\x1bOP\x1b[3~"), []);
        assert_eq!(Key::all(b"\r\x1bm"), [Key::Enter, Key::Escape, Key::Char('m')], "typed faster than read");
        assert_eq!(Key::all(b"\x1b"), [Key::Escape]);
    }
}
