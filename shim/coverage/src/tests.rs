use std::fs;
use std::path::Path;

use super::{Class, Coverage, CoverageError, Release, pages};

#[test]
fn both_libraries_are_covered() {
    let cuda = Coverage::cuda().unwrap();
    assert!(cuda.knows("cuMemAlloc_v2") && cuda.knows("cuArray3DCreate"));
    assert!(!cuda.knows("cuMemAlloc_v99") && !cuda.knows(""));
    let row = |symbol| *cuda.rows().iter().find(|row| row.symbol == symbol).unwrap();
    assert_eq!(row("cuMemAlloc_v2").class, Class::Accounts);
    assert_eq!(
        row("cuMemAlloc_v2").since.map(Release::number),
        Some(3020),
        "as the real driver says"
    );
    assert_eq!(row("cuLaunchKernel_ptsz").since.unwrap().to_string(), "7.0");
    assert!(
        Coverage::nvml()
            .unwrap()
            .knows("nvmlDeviceGetMemoryInfo_v2")
    );
}

#[test]
fn the_reference_pages_are_up_to_date() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for page in pages().unwrap() {
        let there = fs::read_to_string(root.join(page.path)).unwrap_or_default();
        assert!(
            there == page.content,
            "{}: not as generated: run `cargo run -p tranche-shim-coverage --example coverage-page`",
            page.path
        );
    }
}

#[test]
fn an_unclassified_function_is_refused() {
    let subjects = "passes asks Tells.\n";
    let error = |symbols: &str, subjects: &str| Coverage::parse(symbols, subjects).unwrap_err();
    assert!(Coverage::parse("cuA passes 2.0 asks\n", subjects).is_ok());
    for line in [
        "cuA unclassified 2.0 asks",
        "cuA passes 2.0",
        "cuA passes 2 asks",
        "cuA passes 2.0 asks more",
        "cuA",
        "",
    ] {
        assert_eq!(
            error(&format!("{line}\n"), subjects),
            CoverageError::Row(line.into())
        );
    }
    for symbols in [
        "cuB passes - asks\ncuA passes - asks\n",
        "cuA passes - asks\ncuA passes - asks\n",
    ] {
        assert_eq!(error(symbols, subjects), CoverageError::Order("cuA".into()));
    }
    assert_eq!(
        error("cuA passes - copies\n", subjects),
        CoverageError::Undescribed {
            symbol: "cuA".into(),
            class: Class::Passes,
            subject: "copies".into()
        }
    );
    assert_eq!(
        error(
            "cuA passes - asks\n",
            "passes asks Tells.\nqueries asks Tells.\n"
        ),
        CoverageError::Unused {
            class: Class::Queries,
            subject: "asks".into()
        }
    );
    for subjects in [
        "passes asks",
        "nonsense asks Tells.",
        "passes asks A.\npasses asks B.",
    ] {
        assert!(matches!(
            error("cuA passes - asks\n", subjects),
            CoverageError::Subject(_)
        ));
    }
}
