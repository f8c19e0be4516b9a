//! The two text formats: OpenMetrics, which the library writes, and Prometheus' own, for readers that do not ask for OpenMetrics.

use std::fmt::Write as _;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// <https://github.com/prometheus/OpenMetrics>.
    OpenMetrics,
    /// <https://prometheus.io/docs/instrumenting/exposition_formats/>, version 0.0.4.
    Prometheus,
}

impl Format {
    /// The format for a request with this `Accept` header: OpenMetrics only if the request prefers it, as in Prometheus' client
    /// libraries.
    #[must_use]
    pub fn negotiate(accept: Option<&str>) -> Self {
        let (mut open, mut plain) = (0.0, 0.0);
        for range in accept.unwrap_or_default().split(',') {
            let mut parts = range.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
            let quality = parts
                .find_map(|part| part.strip_prefix("q="))
                .map_or(1.0, |q| q.parse().unwrap_or(0.0));
            let of_kind: &mut f64 = match kind.as_str() {
                "application/openmetrics-text" => &mut open,
                "text/plain" | "text/*" | "*/*" => &mut plain,
                _ => continue,
            };
            *of_kind = of_kind.max(quality);
        }
        if open > 0.0 && open >= plain {
            Self::OpenMetrics
        } else {
            Self::Prometheus
        }
    }

    /// The header `Content-Type`.
    #[must_use]
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// A text of OpenMetrics in this format. In Prometheus' a counter has its whole name in its comments, and there are no units and no
    /// end.
    #[must_use]
    pub fn convert(self, text: String) -> String {
        if self == Self::OpenMetrics {
            return text;
        }
        let mut converted = String::with_capacity(text.len());
        // The comments of a metric come in the order HELP, TYPE, UNIT.
        let mut help = None;
        for line in text.lines() {
            let mut words = line.splitn(4, ' ');
            let mut word = || words.next().unwrap_or_default();
            match (word(), word(), word(), word()) {
                ("#", "HELP", name, meaning) => help = Some((name, meaning)),
                ("#", "TYPE", name, kind) => {
                    let total = if kind == "counter" { "_total" } else { "" };
                    // Writing to a string cannot fail.
                    if let Some((_, meaning)) = help.take() {
                        let _ = writeln!(converted, "# HELP {name}{total} {meaning}");
                    }
                    let _ = writeln!(converted, "# TYPE {name}{total} {kind}");
                }
                ("#", ..) => {}
                _ => {
                    converted.push_str(line);
                    converted.push('\n');
                }
            }
        }
        converted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn openmetrics_is_for_those_who_prefer_it() {
        for (accept, format) in [
            (None, Format::Prometheus),
            (Some("*/*"), Format::Prometheus),
            (Some("text/plain"), Format::Prometheus),
            (Some("application/openmetrics-text"), Format::OpenMetrics),
            // Prometheus 2.49, and the same with the other one preferred.
            (
                Some(
                    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
                ),
                Format::OpenMetrics,
            ),
            (
                Some(
                    "text/plain;version=0.0.4;q=0.6,application/openmetrics-text;version=1.0.0;q=0.5",
                ),
                Format::Prometheus,
            ),
            (Some("application/openmetrics-text;q=0"), Format::Prometheus),
            (Some("application/json"), Format::Prometheus),
        ] {
            assert_eq!(Format::negotiate(accept), format, "{accept:?}");
        }
    }

    #[test]
    fn a_counter_has_its_whole_name_and_there_is_no_unit() {
        let open = "# HELP a Things.\n# TYPE a counter\na_total{b=\"# TYPE\"} 1\n\
            # HELP c_bytes Bytes.\n# TYPE c_bytes gauge\n# UNIT c_bytes bytes\nc_bytes 2\n# EOF\n";
        let plain = "# HELP a_total Things.\n# TYPE a_total counter\na_total{b=\"# TYPE\"} 1\n\
            # HELP c_bytes Bytes.\n# TYPE c_bytes gauge\nc_bytes 2\n";
        assert_eq!(Format::Prometheus.convert(open.to_owned()), plain);
        assert_eq!(Format::OpenMetrics.convert(open.to_owned()), open);
    }
}
