// Writes what Kubernetes' own library makes of each line of its input: the line, a tab, and the
// canonical form or the word "error". From this folder:
//
//	go run . < inputs.txt > golden.tsv
package main

import (
	"bufio"
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/api/resource"
)

func main() {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		text := lines.Text()
		quantity, err := resource.ParseQuantity(text)
		if err != nil {
			fmt.Printf("%s\terror\n", text)
			continue
		}
		number, suffix := quantity.CanonicalizeBytes(nil)
		fmt.Printf("%s\t%s%s\n", text, number, suffix)
	}
}
