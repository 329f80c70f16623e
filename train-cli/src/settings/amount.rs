//! Amounts of memory and of files, as a person writes them: `20GiB`, `500 MB`.

use crate::CliError;

/// Bytes from `20GiB`, `500 MB` or `24g`, the value of `flag`.
///
/// # Errors
/// If it is no number with one of these units.
pub(crate) fn bytes(flag: &str, text: &str) -> Result<u64, CliError> {
    let bad = |what: &str| CliError::Usage(format!("{flag} {text}: {what}; write 20GiB or 20000MiB"));
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(|| bad("the unit is missing"))?;
    let number: f64 = text[..at].parse().map_err(|_| bad("this is not a number and a unit"))?;
    let unit: u64 = match text[at..].trim().to_ascii_lowercase().as_str() {
        "mib" | "m" => 1 << 20,
        "gib" | "g" => 1 << 30,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        _ => return Err(bad("the unit is unknown")),
    };
    let bytes = number * unit as f64;
    if bytes > LARGEST { Err(bad("no machine has as much")) } else { Ok(bytes as u64) }
}

/// More bytes than any machine has: 2^60.
const LARGEST: f64 = (1_u64 << 60) as f64;

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn amounts_are_read_with_their_units() {
        for (text, expected) in [("20GiB", 20 << 30), ("500 MB", 500_000_000), ("1.5g", 3 << 29), ("64m", 64 << 20)] {
            assert_eq!(bytes("--memory-limit", text).unwrap(), expected, "{text}");
        }
        for text in ["20", "GiB", "20 kB", "1.2.3GiB", "99999999999999999999GiB"] {
            assert!(bytes("--memory-limit", text).unwrap_err().to_string().contains("write 20GiB"), "{text}");
        }
    }
}
