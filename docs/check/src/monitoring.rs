//! The alerts and dashboards of the chart, and the metrics that their expressions need.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

/// The alerts, in Prometheus' format.
pub const ALERTS: &str = "deploy/helm/tranche/files/alerts.yaml";
/// The dashboards, in Grafana's format.
pub const DASHBOARDS: &str = "deploy/helm/tranche/files/dashboards";

/// Why a file cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct FileError {
    path: PathBuf,
    problem: String,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Alert {
    pub alert: String,
    pub expr: String,
    /// The labels that it adds.
    pub labels: Labels,
    pub annotations: Annotations,
}

/// The labels that an alert adds.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Labels {
    /// `critical`, `warning` or `info`.
    pub severity: String,
}

/// The annotations of an alert.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Annotations {
    /// One line for people.
    pub summary: String,
    /// The address of its page.
    pub runbook_url: String,
}

#[derive(Deserialize)]
struct Rules {
    groups: Vec<RuleGroup>,
}

#[derive(Deserialize)]
struct RuleGroup {
    rules: Vec<Alert>,
}

/// The expression of a panel, or the query of a dashboard's variable.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Expression {
    /// Where it is: the dashboard's file and the panel's title.
    pub place: String,
    /// PromQL with Grafana's variables, or `label_values(…)`.
    pub query: String,
}

fn read(path: &Path) -> Result<String, FileError> {
    fs::read_to_string(path).map_err(|e| FileError {
        path: path.to_owned(),
        problem: e.to_string(),
    })
}

pub fn alerts(repository: &Path) -> Result<Vec<Alert>, FileError> {
    let path = repository.join(ALERTS);
    let rules: Rules = serde_saphyr::from_str(&read(&path)?).map_err(|e| FileError {
        path,
        problem: e.to_string(),
    })?;
    Ok(rules.groups.into_iter().flat_map(|it| it.rules).collect())
}

/// The dashboards' files, by name.
pub fn dashboards(repository: &Path) -> Result<Vec<(String, Value)>, FileError> {
    let folder = repository.join(DASHBOARDS);
    let error = |path: &Path, problem: String| FileError {
        path: path.to_owned(),
        problem,
    };
    let mut found = Vec::new();
    for entry in fs::read_dir(&folder).map_err(|e| error(&folder, e.to_string()))? {
        let path = entry.map_err(|e| error(&folder, e.to_string()))?.path();
        let text = read(&path)?;
        let value = serde_json::from_str(&text).map_err(|e| error(&path, e.to_string()))?;
        let name = path.file_name().unwrap_or_default();
        found.push((name.to_string_lossy().into_owned(), value));
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(found)
}

/// All expressions of the dashboards.
pub fn expressions(repository: &Path) -> Result<Vec<Expression>, FileError> {
    let mut found = Vec::new();
    for (file, dashboard) in dashboards(repository)? {
        let of = |title: &Value| format!("{file}, {}", title.as_str().unwrap_or("no title"));
        let variables = list(&dashboard["templating"]["list"]);
        for variable in variables.filter(|it| it["type"] == "query") {
            found.push(Expression {
                place: of(&variable["name"]),
                query: text(&variable["query"]),
            });
        }
        // A folded row contains its panels.
        let rows = list(&dashboard["panels"]);
        let panels = rows.flat_map(|it| list(&it["panels"]).chain([it]));
        for panel in panels {
            for target in list(&panel["targets"]) {
                found.push(Expression {
                    place: of(&panel["title"]),
                    query: text(&target["expr"]),
                });
            }
        }
    }
    Ok(found)
}

/// The scrape job of docs/monitoring.md: the first item of its first block of YAML.
pub fn scrape_job(repository: &Path) -> Result<Value, FileError> {
    let path = repository.join("docs/monitoring.md");
    let page = read(&path)?;
    let block = page
        .split("```yaml\n")
        .nth(1)
        .and_then(|rest| rest.split("```").next());
    let jobs: Vec<Value> =
        serde_saphyr::from_str(block.unwrap_or_default()).map_err(|e| FileError {
            path: path.clone(),
            problem: e.to_string(),
        })?;
    jobs.into_iter().next().ok_or_else(|| FileError {
        path,
        problem: "it has no block of YAML with a scrape job".to_owned(),
    })
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// The names of our metrics and of DCGM's in an expression. No label begins with their prefixes.
#[must_use]
pub fn metrics(expression: &str) -> BTreeSet<&str> {
    let is_part = |char: char| char.is_ascii_alphanumeric() || char == '_' || char == ':';
    expression
        .split(|char| !is_part(char))
        .filter(|word| word.starts_with("tranche_") || word.starts_with("DCGM_FI_"))
        .collect()
}

/// The names in the tables of the reference pages: the first cell of each row.
#[must_use]
pub fn documented(page: &str) -> BTreeSet<&str> {
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.filter_map(|row| Some(row.split_once("` |")?.0))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_metrics_are_found_and_labels_and_text_are_not() {
        let expression = r#"sum by (namespace) (rate(tranche_share_gpu_time_seconds_total{node=~"$node"}[5m]))
            / on (UUID) group_left (modelName) DCGM_FI_DEV_GPU_UTIL{pod!=""} > 0.1"#;
        let expected = [
            "DCGM_FI_DEV_GPU_UTIL",
            "tranche_share_gpu_time_seconds_total",
        ];
        assert_eq!(metrics(expression), BTreeSet::from(expected));
    }

    #[test]
    fn a_reference_page_names_metrics_in_its_first_column() {
        let page = "| metric | type |\n|---|---|\n| `tranche_a` | gauge | `tranche_b` |\n";
        assert_eq!(documented(page), BTreeSet::from(["tranche_a"]));
    }
}
