//! Jobs on whole GPUs against the same jobs on shares.

use super::Money;

/// Jobs that have a GPU each, and how they would share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Calculator {
    /// Jobs, each on a GPU of its own today.
    pub gpus: u32,
    /// A GPU's price for an hour.
    pub price: Money,
    /// How many of the jobs one GPU can have, at least 1.
    pub tenants: u32,
    /// How much longer a job takes in its share, percent.
    pub overhead: u32,
}

/// What sharing saves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Calculation {
    /// What an hour of a job's work costs on a GPU of its own.
    pub before: Money,
    /// What the same work costs in a share, with the overhead.
    pub after: Money,
    /// The change in tenths of a percent; negative where sharing is cheaper.
    pub change: i64,
    /// GPU-hours a day that are free for others while all jobs run, rounded.
    pub freed: u64,
}

/// Numbers that are no question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CalculatorError {
    /// Nobody on a GPU.
    #[error("tenants is 0: name how many jobs share a GPU, 1 or more")]
    NoTenants,
    /// Nothing to compare.
    #[error("the price is 0: name what a GPU costs for an hour")]
    NoPrice,
}

const HOURS: u64 = 24;

impl Calculator {
    /// Calculates.
    pub fn calculate(self) -> Result<Calculation, CalculatorError> {
        if self.tenants == 0 {
            return Err(CalculatorError::NoTenants);
        }
        if self.price == Money::ZERO {
            return Err(CalculatorError::NoPrice);
        }
        let tenants = u64::from(self.tenants);
        let numerator = 100 + u128::from(self.overhead);
        let denominator = 100 * u128::from(self.tenants);
        let change = numerator * 1000 / denominator;
        let freed = HOURS * u64::from(self.gpus) * (tenants - 1);
        Ok(Calculation {
            before: self.price,
            after: self.price.part(numerator, denominator),
            change: i64::try_from(change).unwrap_or(i64::MAX) - 1000,
            freed: (freed + tenants / 2) / tenants,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published example: 10 GPUs at $3.50. Its inputs are not published; 4 tenants and 8 % overhead give its numbers.
    #[test]
    fn ten_gpus_at_three_and_a_half_dollars() {
        let calculator = Calculator {
            gpus: 10,
            price: "3.50".parse().unwrap(),
            tenants: 4,
            overhead: 8,
        };
        let result = calculator.calculate().unwrap();
        assert_eq!(result.before.to_string(), "$3.50");
        assert_eq!(result.after.to_string(), "$0.95");
        assert_eq!(result.change, -730);
        assert_eq!(result.freed, 180);
    }

    #[test]
    fn one_tenant_with_overhead_is_dearer() {
        let calculator = Calculator {
            gpus: 3,
            price: "2".parse().unwrap(),
            tenants: 1,
            overhead: 10,
        };
        let result = calculator.calculate().unwrap();
        assert_eq!(
            (
                result.after.to_string().as_str(),
                result.change,
                result.freed
            ),
            ("$2.20", 100, 0)
        );
    }

    #[test]
    fn what_is_no_question_is_refused() {
        let calculator = Calculator {
            gpus: 1,
            price: Money::from_micros(1),
            tenants: 0,
            overhead: 0,
        };
        assert_eq!(calculator.calculate(), Err(CalculatorError::NoTenants));
        let calculator = Calculator {
            price: Money::ZERO,
            tenants: 1,
            ..calculator
        };
        assert_eq!(calculator.calculate(), Err(CalculatorError::NoPrice));
    }
}
