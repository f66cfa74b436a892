import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.ConcurrentLinkedQueue;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.RetryForever;

/** Curator's mutex in the benchmarks: does what lines on its standard input say, and answers with figures and "ok". */
class Peer {
    private static CuratorFramework client;
    private static InterProcessMutex first;
    private static final List<Thread> waiters = new ArrayList<>();
    private static final ConcurrentLinkedQueue<Double> entered = new ConcurrentLinkedQueue<>();

    interface Work {
        void run() throws Exception;
    }

    public static void main(String[] args) throws Exception {
        BufferedReader orders = new BufferedReader(new InputStreamReader(System.in));
        PrintStream out = new PrintStream(System.out, false);
        for (String line = orders.readLine(); line != null; line = orders.readLine()) {
            String[] words = line.split(" ");
            switch (words[0]) {
                case "open" -> open(words[1]);
                case "close" -> client.close();
                case "turns" -> turns(words[1], Integer.parseInt(words[2]));
                case "drain" -> drain(words, out);
                case "line" -> line(words[1], Integer.parseInt(words[2]));
                case "pass" -> pass(out);
                default -> throw new IllegalArgumentException(line);
            }
            out.println("ok");
            out.flush();
        }
        System.exit(0);
    }

    /** Seconds of the clock that Python calls monotonic. */
    private static double now() {
        return System.nanoTime() / 1e9;
    }

    private static void open(String hosts) throws Exception {
        client = CuratorFrameworkFactory.newClient(hosts, 30000, 15000, new RetryForever(50));
        client.start();
        client.blockUntilConnected();
    }

    private static void turns(String path, int count) throws Exception {
        InterProcessMutex mutex = new InterProcessMutex(client, path);
        for (int turn = 0; turn < count; turn++) {
            mutex.acquire();
            mutex.release();
        }
    }

    private static void drain(String[] words, PrintStream out) throws Exception {
        int turns = Integer.parseInt(words[1]);
        long hold = Long.parseLong(words[2]);
        ConcurrentLinkedQueue<String> spans = new ConcurrentLinkedQueue<>();
        List<Thread> contenders = new ArrayList<>();
        for (int number = 0; number < words.length - 3; number++) {
            String path = words[number + 3];
            int mine = number;
            contenders.add(started(() -> contend(path, turns, hold, mine, spans)));
        }
        for (Thread contender : contenders) {
            contender.join();
        }
        spans.forEach(out::println);
    }

    private static void contend(
            String path, int turns, long hold, int number, ConcurrentLinkedQueue<String> spans)
            throws Exception {
        InterProcessMutex mutex = new InterProcessMutex(client, path);
        for (int turn = 0; turn < turns; turn++) {
            double asked = now();
            mutex.acquire();
            double inside = now();
            if (hold > 0) {
                Thread.sleep(hold);
            }
            double left = now();
            mutex.release();
            spans.add(asked + " " + inside + " " + left + " " + number);
        }
    }

    private static void line(String path, int count) throws Exception {
        entered.clear();
        waiters.clear();
        first = new InterProcessMutex(client, path);
        first.acquire();
        for (int number = 0; number < count; number++) {
            waiters.add(started(() -> {
                InterProcessMutex mutex = new InterProcessMutex(client, path);
                mutex.acquire();
                entered.add(now());
                mutex.release();
            }));
            // Not all at once: each newcomer reads the whole list, and a small server drowns in its answers.
            if (number % 20 == 19) {
                Thread.sleep(30);
            }
        }
    }

    private static void pass(PrintStream out) throws Exception {
        double start = now();
        first.release();
        for (Thread waiter : waiters) {
            waiter.join();
        }
        out.println(start);
        entered.forEach(out::println);
    }

    private static Thread started(Work work) {
        Thread thread = new Thread(null, () -> {
            try {
                work.run();
            } catch (Exception error) {
                throw new IllegalStateException(error);
            }
        }, "contender", 256 * 1024);
        thread.start();
        return thread;
    }
}
