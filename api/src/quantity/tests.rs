use std::hash::{BuildHasher, RandomState};

use proptest::prelude::*;
use serde_json::json;

use super::*;

/// Written by Kubernetes' own library; see `testdata/quantity/main.go`.
const GOLDEN: &str = include_str!("../../testdata/quantity/golden.tsv");

fn quantity(text: &str) -> Quantity {
    text.parse().unwrap_or_else(|error| panic!("{error}"))
}

/// Whether we differ from Go on purpose.
fn differs_on_purpose(go: &str, ours: &Result<Quantity, ParseError>) -> bool {
    match ours {
        // Go takes a sign or a suffix alone for zero.
        Err(ParseError::Syntax { .. }) => go == "0",
        Err(ParseError::Suffix { .. }) => false,
        // Go rounds up to a billionth; it has no upper limit for decimal amounts.
        Err(ParseError::TooPrecise { .. } | ParseError::OutOfRange { .. }) => go != "error",
        // Go cuts binary amounts off at 2^63-1. It has no suffix beyond E and leaves it out.
        Ok(quantity) => {
            *quantity > Quantity::from_count(i64::MAX.unsigned_abs())
                && ["9223372036854775807", "1"].contains(&go)
        }
    }
}

#[test]
fn canonical_forms_are_gos() {
    let (mut same, mut different) = (0, 0);
    for line in GOLDEN.lines() {
        let (text, go) = line.split_once('\t').unwrap();
        let ours = text.parse::<Quantity>();
        let printed = ours
            .as_ref()
            .map_or_else(|_| "error".to_owned(), ToString::to_string);
        if printed == go {
            same += 1;
        } else {
            assert!(
                differs_on_purpose(go, &ours),
                "{text:?}: Go {go:?}, we {printed:?}"
            );
            different += 1;
        }
    }
    assert_eq!((same, different), (764, 90));
}

#[test]
fn errors_say_what_is_wrong() {
    for (text, expected) in [
        (
            "",
            r#""" is not a quantity: write a number with an optional suffix, such as 20Gi"#,
        ),
        (
            "20 Gi",
            r#""20 Gi" is not a quantity: write a number with an optional suffix, such as 20Gi"#,
        ),
        (
            "20GB",
            r#""20GB" ends in the unknown suffix "GB": use one of Ki Mi Gi Ti Pi Ei, n u m k M G T P E, or an exponent such as e3"#,
        ),
        (
            "0.5n",
            r#""0.5n" is finer than a billionth: write at most nine decimal places"#,
        ),
        (
            "1e30",
            r#""1e30" is out of range: its magnitude must stay below 1.7e29"#,
        ),
    ] {
        assert_eq!(text.parse::<Quantity>().unwrap_err().to_string(), expected);
    }
}

#[test]
fn equality_order_and_hash_go_by_value() {
    let hasher = RandomState::new();
    for (one, other) in [
        ("1Gi", "1024Mi"),
        ("1Gi", "1073741824"),
        ("1k", "1e3"),
        ("0.5", "500m"),
        ("-0", "0Ki"),
    ] {
        let (one, other) = (quantity(one), quantity(other));
        assert_eq!(one, other);
        assert_eq!(hasher.hash_one(one), hasher.hash_one(other));
    }
    assert!(quantity("-1") < quantity("1n"));
    assert!(quantity("1Gi") > quantity("1G"));
}

#[test]
fn counts_are_whole_and_not_negative() {
    assert_eq!(quantity("20Gi").to_count(), Ok(20 << 30));
    assert_eq!(quantity("1.5Ki").to_count(), Ok(1536));
    assert_eq!(quantity("18446744073709551615").to_count(), Ok(u64::MAX));
    for (text, expected) in [
        ("-1Gi", "-1Gi is negative"),
        ("-500m", "-500m is negative"),
        ("500m", "500m is not a whole number"),
        (
            "18446744073709551616",
            "18446744073709551616 is more than 2^64-1",
        ),
    ] {
        assert_eq!(quantity(text).to_count().unwrap_err().to_string(), expected);
    }
}

#[test]
fn sums_keep_the_format_of_what_is_not_zero() {
    let add = |a, b| quantity(a).checked_add(quantity(b)).unwrap().to_string();
    assert_eq!(add("1Gi", "1024k"), "1049576Ki");
    assert_eq!(add("1Gi", "1024Mi"), "2Gi");
    assert_eq!(add("0", "1024Mi"), "1Gi");
    assert_eq!(
        quantity("1Gi").checked_sub(quantity("1Gi")).unwrap(),
        Quantity::ZERO
    );
    assert_eq!(quantity("1.5Gi").checked_mul(-2).unwrap(), quantity("-3Gi"));
}

#[test]
fn results_out_of_range_are_refused() {
    let most = quantity("170141183460469231731687303715");
    assert_eq!(most.checked_add(most), Err(Overflow));
    assert_eq!(most.checked_mul(2), Err(Overflow));
    assert_eq!(
        most.checked_mul(-1).unwrap().checked_sub(most),
        Err(Overflow)
    );
}

#[test]
fn json_may_hold_an_integer_or_a_string() {
    let read = |value| serde_json::from_value::<Quantity>(value);
    assert_eq!(read(json!("20Gi")).unwrap(), quantity("20Gi"));
    assert_eq!(read(json!(1_048_576)).unwrap(), quantity("1Mi"));
    assert_eq!(read(json!(-1)).unwrap(), quantity("-1"));
    for refused in [
        json!(1.5),
        json!(null),
        json!(true),
        json!({}),
        json!("20GB"),
    ] {
        assert!(read(refused.clone()).is_err(), "{refused}");
    }
    assert_eq!(json!(quantity("1024Ki")), json!("1Mi"));
}

/// A decimal number as its digits, for sums done the way they are done on paper.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Paper {
    /// Digits of the amount in billionths, without leading zeros.
    digits: Vec<u8>,
}

impl Paper {
    /// `number` (digits, maybe a point) times each of the factors, in billionths.
    fn new(number: &str, factors: &[u32]) -> Option<Self> {
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let mut digits: Vec<u8> = whole
            .bytes()
            .chain(fraction.bytes())
            .map(|b| b - b'0')
            .collect();
        for factor in factors {
            digits = times(&digits, *factor);
        }
        digits.extend([0; 9]);
        let kept = digits.len() - fraction.len();
        if digits[kept..].iter().any(|digit| *digit != 0) {
            return None;
        }
        digits.truncate(kept);
        let zeros = digits.iter().take_while(|digit| **digit == 0).count();
        Some(Self {
            digits: digits.split_off(zeros),
        })
    }

    /// Longer numbers are larger; among equals the digits decide.
    fn rank(&self) -> (usize, &[u8]) {
        (self.digits.len(), &self.digits)
    }

    fn text(&self) -> String {
        if self.digits.is_empty() {
            return "0".to_owned();
        }
        self.digits
            .iter()
            .map(|digit| char::from(b'0' + digit))
            .collect()
    }
}

fn times(digits: &[u8], factor: u32) -> Vec<u8> {
    let mut carry = 0;
    let mut product: Vec<u8> = Vec::new();
    for digit in digits.iter().rev() {
        carry += u32::from(*digit) * factor;
        product.push(u8::try_from(carry % 10).unwrap());
        carry /= 10;
    }
    while carry > 0 {
        product.push(u8::try_from(carry % 10).unwrap());
        carry /= 10;
    }
    product.reverse();
    product
}

fn any_number() -> impl Strategy<Value = String> {
    prop_oneof!["[0-9]{1,12}", "[0-9]{0,9}\\.[0-9]{1,12}", "[0-9]{1,9}\\."]
}

/// A suffix, and what it multiplies by.
fn any_suffix() -> impl Strategy<Value = (&'static str, Vec<u32>)> {
    let decimal = |suffix, power: usize| (suffix, vec![10; power]);
    let binary = |suffix, power: usize| (suffix, vec![1024; power]);
    prop::sample::select(vec![
        decimal("", 0),
        decimal("k", 3),
        decimal("M", 6),
        decimal("G", 9),
        decimal("T", 12),
        decimal("P", 15),
        decimal("E", 18),
        decimal("e1", 1),
        decimal("E+11", 11),
        binary("Ki", 1),
        binary("Mi", 2),
        binary("Gi", 3),
        binary("Ti", 4),
        binary("Pi", 5),
        binary("Ei", 6),
    ])
}

fn any_quantity() -> impl Strategy<Value = Quantity> {
    let format = prop::sample::select(vec![
        Format::BinarySi,
        Format::DecimalSi,
        Format::DecimalExponent,
    ]);
    // Shifting and multiplying makes round numbers frequent: they take the larger suffixes.
    let nanos = prop_oneof![
        any::<i64>().prop_map(i128::from),
        (any::<i32>(), 0..60_u32).prop_map(|(n, shift)| i128::from(n) << shift),
        (any::<i16>(), 0..34_u32).prop_map(|(n, power)| i128::from(n) * 10_i128.pow(power)),
        (any::<i32>(), 0..40_u32).prop_map(|(n, shift)| (i128::from(n) * UNIT) << shift),
    ];
    (nanos, format).prop_map(|(nanos, format)| Quantity { nanos, format })
}

proptest! {
    #[test]
    fn parsing_agrees_with_sums_on_paper(number in any_number(), (suffix, factors) in any_suffix()) {
        let parsed = format!("{number}{suffix}").parse::<Quantity>();
        let most = i128::MAX.to_string();
        match (Paper::new(&number, &factors), parsed) {
            (Some(paper), Ok(quantity)) => prop_assert_eq!(quantity.nanos.to_string(), paper.text()),
            (Some(paper), Err(ParseError::OutOfRange { .. })) => {
                let text = paper.text();
                prop_assert!((text.len(), &text) > (most.len(), &most));
            }
            (None, Err(ParseError::TooPrecise { .. })) => {}
            (paper, parsed) => prop_assert!(false, "{:?} {:?}", paper, parsed),
        }
    }

    #[test]
    fn order_agrees_with_sums_on_paper(
        (a, (sa, fa)) in (any_number(), any_suffix()),
        (b, (sb, fb)) in (any_number(), any_suffix()),
    ) {
        let (qa, qb) = (format!("{a}{sa}").parse::<Quantity>(), format!("{b}{sb}").parse::<Quantity>());
        if let (Ok(qa), Ok(qb)) = (qa, qb) {
            let (pa, pb) = (Paper::new(&a, &fa).unwrap(), Paper::new(&b, &fb).unwrap());
            prop_assert_eq!(qa.cmp(&qb), pa.rank().cmp(&pb.rank()));
        }
    }

    #[test]
    fn what_is_printed_is_read_back(quantity in any_quantity()) {
        let printed = quantity.to_string();
        let read: Quantity = printed.parse().unwrap();
        prop_assert_eq!(read, quantity);
        // A binary amount without a suffix is read back as a decimal one, in Go too.
        if read.format() == quantity.format() {
            prop_assert_eq!(read.to_string(), printed);
        }
    }

    #[test]
    fn a_difference_undoes_a_sum(a in any_quantity(), b in any_quantity()) {
        let sum = a.checked_add(b).unwrap();
        prop_assert_eq!(sum.checked_sub(b).unwrap(), a);
        prop_assert_eq!(b.checked_add(a).unwrap(), sum);
    }

    #[test]
    fn no_text_makes_it_panic(text in ".*", like in "[-+]?[0-9.]{0,60}[eE]?[-+]?[0-9]{0,12}[numkMGTPEi]{0,2}") {
        let _ = text.parse::<Quantity>();
        let _ = like.parse::<Quantity>();
    }

    #[test]
    fn bytes_that_we_write_match_their_schema(bytes in any::<i64>(), shift in 0..63_u32) {
        let bytes = Quantity::from_bytes(bytes.unsigned_abs() >> shift << shift).to_string();
        prop_assert!(regex::Regex::new(BYTES_PATTERN).unwrap().is_match(&bytes), "{}", bytes);
    }

    #[test]
    fn bytes_that_match_their_schema_can_be_held(bytes in BYTES_PATTERN.trim_matches(['^', '$'])) {
        prop_assert!(bytes.parse::<Quantity>().is_ok(), "{}", bytes);
    }

    #[test]
    fn what_parses_matches_the_schema(like in "[-+]?[0-9.]{0,6}[eE]?[-+]?[0-9]{0,2}[numkMGTPEi]{0,2}") {
        if like.parse::<Quantity>().is_ok() {
            prop_assert!(regex::Regex::new(PATTERN).unwrap().is_match(&like), "{}", like);
        }
    }
}

#[test]
fn a_fraction_is_rounded_up_to_a_count() {
    let count = |text: &str| text.parse::<Quantity>().unwrap().to_count_rounded_up();
    assert_eq!(count("2"), Ok(2));
    assert_eq!(count("1500m"), Ok(2));
    assert_eq!(count("1n"), Ok(1));
    assert_eq!(count("-500m"), Ok(0));
    assert!(count("-1500m").is_err());
}
